"""tamiyo: policy -- sees reports, chooses actions."""
