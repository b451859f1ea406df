"""Whether a model computes through pages and slots what its definition says; told by trying it."""
