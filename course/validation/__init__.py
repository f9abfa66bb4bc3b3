"""Programs whose memory or time others have published or a closed form gives: what the lenses are compared with."""
