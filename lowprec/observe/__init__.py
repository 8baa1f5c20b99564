"""Seeing what low precision did to the numbers: counters as a model trains, and the page that shows them."""
