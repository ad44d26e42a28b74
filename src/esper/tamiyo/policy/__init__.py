"""What Tamiyo decides with: masks, features, distributions and the network."""
