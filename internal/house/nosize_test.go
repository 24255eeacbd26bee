//go:build !grpcnotrace

package house

import "testing"

func programSize(*testing.T) int { return unmeasured }
