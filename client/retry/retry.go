// Package retry has policies that say when a client repeats what has failed. It refuses to
// know what that was: the client decides what may be repeated.
package retry

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"
)

// The waits of Exponential, and of Fixed in Parse.
const (
	First = 100 * time.Millisecond
	Most  = 10 * time.Second
	Every = 1 * time.Second
)

// Attempt is one that has failed.
type Attempt struct {
	N     int           // how many there have been, this one included
	Err   error         // why it failed
	After time.Duration // how long the server asks its caller to wait; 0 if it does not
}

// Policy returns how long to wait before the next attempt, and whether there is to be one. It
// must be safe for concurrent use. nil stands for none.
type Policy func(Attempt) (wait time.Duration, again bool)

// Exponential waits about First, and each time twice as long, up to Most: at random between a
// half of that and all of it, because callers that failed together would return together.
func Exponential() Policy {
	return func(a Attempt) (time.Duration, bool) {
		wait := Most
		if n := a.N - 1; n < 7 { // 2⁷ · First > Most
			wait = First << n
		}
		return wait/2 + rand.N(wait/2), true
	}
}

// Fixed always waits for d.
func Fixed(d time.Duration) Policy {
	return func(Attempt) (time.Duration, bool) { return d, true }
}

// Adaptive waits for as long as the server asks and at random up to a half more, and like
// Exponential where it does not ask.
func Adaptive() Policy {
	otherwise := Exponential()
	return func(a Attempt) (time.Duration, bool) {
		if a.After <= 0 {
			return otherwise(a)
		}
		return a.After + rand.N(a.After/2+1), true
	}
}

// Waits makes an attempt after each of the waits, and no more.
func Waits(waits ...time.Duration) Policy {
	waits = slices.Clone(waits)
	return func(a Attempt) (time.Duration, bool) {
		if a.N > len(waits) {
			return 0, false
		}
		return waits[a.N-1], true
	}
}

// Parse returns the policy of a text: none, exponential, adaptive, fixed, which is
// Fixed(Every), or waits with commas between, such as 100ms,1s.
func Parse(text string) (Policy, error) {
	switch text {
	case "", "none":
		return nil, nil
	case "exponential":
		return Exponential(), nil
	case "adaptive":
		return Adaptive(), nil
	case "fixed":
		return Fixed(Every), nil
	}
	var waits []time.Duration
	for word := range strings.SplitSeq(text, ",") {
		d, err := time.ParseDuration(word)
		if err != nil || d < 0 {
			return nil, fmt.Errorf("retry: %q is not a policy: write none, exponential, adaptive, fixed, or waits such as 100ms,1s", text)
		}
		waits = append(waits, d)
	}
	return Waits(waits...), nil
}
