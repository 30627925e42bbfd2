"""Files that are never half written: hashes, sealed manifests, the journal of a run."""
