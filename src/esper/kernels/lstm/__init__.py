"""LSTM kernels behind `tamiyo.policy.recurrence`; each is imported when it is first used."""
