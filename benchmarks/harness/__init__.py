"""What every benchmark needs: paired timing, ranks, networks, and dated records."""
