package serve

// Version ends in -dev between releases.
const Version = "0.1.0-dev"
