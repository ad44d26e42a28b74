"""simic: learning -- turns experience into a better policy."""
