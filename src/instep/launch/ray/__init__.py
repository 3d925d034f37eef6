"""Ray as a launcher. Way in: `launcher.Ray`."""
