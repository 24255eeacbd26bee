package reason

// Bytes is the longest reason, as of a google.rpc.ErrorInfo.
const Bytes = 63
