"""The page: one HTML file about runs, written once (`fedrema report`) or served while they go on (`fedrema watch`)."""
