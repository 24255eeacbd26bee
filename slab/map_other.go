//go:build !linux

package slab

func allocate(n int) (mem []byte, mapped bool) { return make([]byte, n), false }

func unmap([]byte) {}
