"""The reference backend: what every op means, in pure torch that runs on any device."""
