"""A router tells its watchers what happens there: ranks as they change, requests as they run and end."""
