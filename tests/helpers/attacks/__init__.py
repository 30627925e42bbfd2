"""What the campaign of tests/adversarial is made of."""
