"""A router reports to its watchers what happens there: ranks as they change, requests as they run and end."""
