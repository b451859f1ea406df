"""What happens on a router, told to whoever watches: ranks as they change, requests as they run and end."""
