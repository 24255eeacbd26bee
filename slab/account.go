package slab

import (
	"context"
	"fmt"
)

// Account is what one holder takes of a Budget for one thing, such as a call or a transfer,
// and gives back with it. It is safe for concurrent use.
type Account struct {
	budget *Budget
	holder *Principal
	held   int64 // guarded by budget.mu, as below
	closed bool
}

// Account returns an empty account of holder.
func (b *Budget) Account(holder *Principal) *Account { return &Account{budget: b, holder: holder} }

// Take takes n bytes, as TryAcquire does, and reports whether it could. After Close it cannot.
func (a *Account) Take(n int64) bool {
	a.budget.mu.Lock()
	defer a.budget.mu.Unlock()
	ok := n == 0 || !a.closed && a.budget.try(a.holder, n)
	if ok {
		a.held += n
	}
	return ok
}

// Wait takes n bytes, and waits for them as Acquire does.
func (a *Account) Wait(ctx context.Context, n int64) error {
	if err := a.budget.Acquire(ctx, a.holder, n); err != nil {
		return err
	}
	a.budget.mu.Lock()
	defer a.budget.mu.Unlock()
	if a.closed {
		a.budget.release(a.holder, n)
		return fmt.Errorf("%w: the account of %q is closed", ErrBudget, a.holder.Name())
	}
	a.held += n
	return nil
}

// Release gives n bytes back.
func (a *Account) Release(n int64) {
	a.budget.mu.Lock()
	defer a.budget.mu.Unlock()
	a.held -= n
	a.budget.release(a.holder, n)
}

// Held returns the bytes that are taken now.
func (a *Account) Held() int64 {
	a.budget.mu.Lock()
	defer a.budget.mu.Unlock()
	return a.held
}

// Close gives back all that is held. Slabs of Get must have been released.
func (a *Account) Close() {
	a.budget.mu.Lock()
	defer a.budget.mu.Unlock()
	a.budget.release(a.holder, a.held)
	a.held, a.closed = 0, true
}

// Get hands over a slab of n bytes of p, for which the account has taken size bytes, as SizeOf
// or PagesOf says. With the slab's last reference, or with an error, they are given back.
func (a *Account) Get(p *Pool, n int, size int64) (*Slab, error) {
	s, err := p.get(n, int(size))
	if err != nil {
		a.Release(size)
		return nil, err
	}
	s.account = a
	return s, nil
}
