"""This package has the cluster's messages: code generated from proto/, and its translation to our own
values.
"""
