"""SGLang seen from our process: started, asked, counted."""
