"""Does a checkpoint hold what its manifest says, and does the model compute what Hugging Face's does?"""
