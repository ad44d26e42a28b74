"""Whether growing helped: every arm on the same hosts, differences with intervals, plain verdicts."""
