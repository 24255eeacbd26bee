package identity

// Forget has s log anew that its certificate expires.
func Forget(s *Server) { s.warned.Store(0) }
