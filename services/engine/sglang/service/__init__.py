"""SGLang is seen from our process here: started, asked, counted."""
