"""Files and batches: stored requests that are run behind interactive ones, by the code that answers those."""
