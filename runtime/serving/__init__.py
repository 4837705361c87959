"""OpenAI's API over HTTP: one generation at a time, what is kept between requests, and the status page."""
