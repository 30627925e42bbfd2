"""The plan: from headers alone, all that a conversion will do, and the proof that it covers source and output."""
