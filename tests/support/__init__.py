"""What tests share: small models, runs and environments, and slow but plain oracles."""
