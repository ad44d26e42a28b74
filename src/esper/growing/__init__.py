"""growing: adoption -- your own nn.Module, grown within a budget and returned as a plain one."""
