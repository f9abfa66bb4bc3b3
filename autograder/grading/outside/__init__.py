"""What judges and does not run confined: intake to points, for one submission."""
