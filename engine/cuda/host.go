//go:build linux && cgo

package cuda

// #include "driver.h"
import "C"

import (
	"fmt"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/blocks"
	"github.com/tensorferry/tensorferry/slab"
)

// Open opens a device and starts the goroutines that feed it, which end with Close.
// It waits for the driver four times Config.Hang at most. Errors wrap engine.ErrUnavailable.
func Open(c Config) (*Host, error) {
	c.setDefaults()
	return bounded(c.Hang, func() (*Host, error) { return open(c) }, (*Host).Close)
}

func open(c Config) (*Host, error) {
	d, n, version, err := openDriver(c)
	if err != nil {
		return nil, err
	}
	if c.Device < 0 || c.Device >= n {
		return nil, fmt.Errorf("%w: no device cuda:%d; the driver has %d", engine.ErrUnavailable, c.Device, n)
	}
	about, err := d.describe(c.Device, version)
	if err != nil {
		return nil, err
	}
	v, err := newDevice(d, c, about)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", engine.ErrUnavailable, err)
	}
	h := &Host{
		device: v,
		pool:   slab.NewPool(c.PinnedBytes, v.pinned), budget: slab.NewBudget("pinned", c.PinnedBytes),
	}
	h.engine = blocks.New(blocks.Config{Name: fmt.Sprintf("cuda:%d", c.Device), Device: v, Pool: h.pool, Budget: h.budget, Spill: c.Spill, CloseWait: c.closing})
	v.run(h.engine)
	return h, nil
}

// gauges are what all models measure.
func (h *Host) gauges() []engine.Gauge {
	used, _, limit := h.budget.Used()
	return []engine.Gauge{
		{Name: "pinned_used_bytes", Meaning: "page-locked memory that calls hold", Value: float64(used)},
		{Name: "pinned_limit_bytes", Meaning: "the most that they may hold", Value: float64(limit)},
		{Name: "device_blocks", Meaning: "blocks that are on the device", Value: float64(h.device.busy())},
	}
}
