package recent

// Most is how many ended calls and tensors are remembered: more than may be on their way at
// a time.
const Most = 1024
