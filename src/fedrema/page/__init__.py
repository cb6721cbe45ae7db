"""The page about runs: one HTML file (`fedrema report`), or served and updated while runs train (`fedrema watch`)."""
