package chunker

// MaxResends is how many chunks may wait to be sent again: a flaw in transit is
// rare, so more at a time are a mistake or an attack, and keeping them in order
// stays cheap.
const MaxResends = 1024
