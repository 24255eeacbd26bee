// Package local serves on a free port of this machine, so that the other examples need no
// server beside them.
package local

import (
	"net"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/cpu"
	"github.com/tensorferry/tensorferry/server"
)

// Serve serves models of a host, and what else cfg says, until stop is called, which returns
// why serving had ended before.
func Serve(host *cpu.Host, cfg server.Config, models ...engine.Model) (address string, stop func() error, err error) {
	cfg.Models, cfg.Pool, cfg.Budget = engine.NewRegistry(), host.Pool(), host.Budget()
	for _, m := range models {
		if err := cfg.Models.Add(m); err != nil {
			return "", nil, err
		}
	}
	s, err := server.New(cfg)
	if err != nil {
		return "", nil, err
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		s.Close()
		return "", nil, err
	}
	served := make(chan error, 1)
	go func() { served <- s.Serve(l) }() // ends with s.Close
	return l.Addr().String(), func() error { s.Close(); return <-served }, nil
}
