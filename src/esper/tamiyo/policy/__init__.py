"""The learned policy: features and masks of reports, action distributions, actor-critic."""
