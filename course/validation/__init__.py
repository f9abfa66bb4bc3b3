"""Programs with published memory or time, or with a closed form, for validating the analyses."""
