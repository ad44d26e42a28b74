"""Adapt a trained model to shifted data with few labelled rows; the package behind `esper.adapt`."""
