"""grow: adoption -- your own nn.Module, grown within a budget and handed back as a plain one."""
