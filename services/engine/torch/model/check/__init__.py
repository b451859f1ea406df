"""A model is tried: it must compute through pages and slots what its definition says."""
