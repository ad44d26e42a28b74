"""LSTM kernels behind `tamiyo.policy.packed_lstm`; each is imported when it is first used."""
