"""The leaderboard: its grid files, the finished runs that come with fedrema, and what is shown of them."""
