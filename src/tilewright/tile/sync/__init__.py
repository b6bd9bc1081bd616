"""Between threads: where barriers go, and where shared arrays lie."""
