"""Trunks with heads, and heads on frozen trunks: what is trained, the loop, its files and its figures."""
