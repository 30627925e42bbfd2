"""The work of a conversion: threads that read, transform and write what a plan says."""
