"""adapting: adaptation -- a trained model, changed for other data by a controller that practised on many shifts."""
