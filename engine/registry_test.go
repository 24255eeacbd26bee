package engine_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/cpu"
	"github.com/tensorferry/tensorferry/engine/enginetest"
	"github.com/tensorferry/tensorferry/tensor"
)

// closing makes a model that counts how often it is closed.
func closing(t *testing.T, h *cpu.Host, name string, closed *int) engine.Model {
	t.Helper()
	port := []engine.Port{{Name: "x", Shape: []int64{engine.AnyAxes}}}
	m, err := cpu.RowFunc{
		Info: engine.Info{Name: name, Inputs: port, Outputs: port}, Rows: func(context.Context, cpu.RowBlock) error { return nil },
		Teardown: func() { *closed++ },
	}.Model(h)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func TestAModelIsClosedAfterItsLastUse(t *testing.T) {
	h := cpu.NewHost(cpu.HostConfig{Workers: 1})
	defer h.Close()
	r := engine.NewRegistry()
	var old, young int
	if err := r.Add(closing(t, h, "m", &old)); err != nil {
		t.Fatal(err)
	}
	if err := r.Add(closing(t, h, "m", &young)); !errors.Is(err, engine.ErrExists) {
		t.Errorf("a second model of the name: %v, want ErrExists", err)
	}
	first, release, err := r.Lookup("m")
	if err != nil {
		t.Fatal(err)
	}
	_, again, err := r.Lookup("m")
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Replace(closing(t, h, "m", &young)); err != nil {
		t.Fatal(err)
	}
	release()
	if old != 0 {
		t.Error("the old model was closed while in use")
	}
	second, releaseSecond, err := r.Lookup("m")
	if err != nil || second == first {
		t.Errorf("after Replace, Lookup found the old model, %v", err)
	}
	again()
	if old != 1 || young != 0 {
		t.Errorf("the models were closed %d and %d times, want 1 and 0", old, young)
	}
	if err := r.Remove("m"); err != nil || young != 0 {
		t.Errorf("Remove returned %v, and closed the model in use %d times", err, young)
	}
	if err := r.Remove("m"); !errors.Is(err, engine.ErrNotFound) {
		t.Errorf("a second Remove returned %v, want ErrNotFound", err)
	}
	if m, f, err := r.Lookup("m"); m != nil || f != nil || !errors.Is(err, engine.ErrNotFound) {
		t.Errorf("Lookup returned %v, want ErrNotFound", err)
	}
	releaseSecond()
	if young != 1 {
		t.Errorf("the model was closed %d times after its last use", young)
	}
	panics(t, "a release too many", releaseSecond)
}

func TestInfosAreSortedByName(t *testing.T) {
	h := cpu.NewHost(cpu.HostConfig{Workers: 1})
	defer h.Close()
	r := engine.NewRegistry()
	closed := 0
	for _, name := range []string{"b", "ä", "a", "c"} {
		if err := r.Replace(closing(t, h, name, &closed)); err != nil {
			t.Fatal(err)
		}
	}
	var names []string
	for _, i := range r.Infos() {
		names = append(names, i.Name)
	}
	if want := []string{"a", "b", "c", "ä"}; !slices.Equal(names, want) {
		t.Errorf("got %q, want %q", names, want)
	}
	r.Close()
	if closed != 4 || len(r.Infos()) != 0 {
		t.Errorf("Close closed %d of 4 models and left %v", closed, r.Infos())
	}
}

type badlyNamed struct{ engine.Model }

func (badlyNamed) Info() engine.Info { return engine.Info{Name: strings.Repeat("x", 513)} }

func TestARegistryTakesNoBadName(t *testing.T) {
	r := engine.NewRegistry()
	if err := r.Add(badlyNamed{}); !errors.Is(err, engine.ErrInfo) {
		t.Errorf("Add returned %v, want ErrInfo", err)
	}
	if err := r.Replace(badlyNamed{}); !errors.Is(err, engine.ErrInfo) {
		t.Errorf("Replace returned %v, want ErrInfo", err)
	}
}

func TestModelsComeAndGoWhileTheyAreUsed(t *testing.T) {
	h := cpu.NewHost(cpu.HostConfig{Workers: 1})
	defer h.Close()
	r := engine.NewRegistry()
	var mu sync.Mutex
	made, closed := 0, 0
	fresh := func() engine.Model {
		mu.Lock()
		defer mu.Unlock()
		made++
		port := []engine.Port{{Name: "x"}}
		m, err := cpu.Func{
			Info: engine.Info{Name: "m", Inputs: port, Outputs: port}, Call: func(_ context.Context, in []tensor.Tensor, _ map[string]string) ([]tensor.Tensor, error) {
				return in, nil
			},
			Teardown: func() { mu.Lock(); defer mu.Unlock(); closed++ },
		}.Model(h)
		if err != nil {
			t.Error(err)
		}
		return m
	}
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 200 {
				if err := r.Replace(fresh()); err != nil {
					t.Error(err)
				}
				if m, release, err := r.Lookup("m"); err == nil {
					_ = m.Info()
					release()
				}
				_ = r.Remove("m") // another may have been first
			}
		})
	}
	wg.Wait()
	r.Close()
	if made != closed {
		t.Errorf("%d models were made and %d closed", made, closed)
	}
}

type plainly struct{ engine.Model }

func (plainly) Info() engine.Info { return engine.Info{Name: "m"} }

func TestAWatcherIsToldWhatThereIsAndWhatComesAndGoes(t *testing.T) {
	r := engine.NewRegistry()
	if err := r.Add(plainly{}); err != nil {
		t.Fatal(err)
	}
	var told []bool
	stop := r.Watch(func(name string, m engine.Model) {
		if name != "m" {
			t.Errorf("told of %q", name)
		}
		told = append(told, m != nil)
	})
	for what, step := range []struct {
		do   func() error
		want []bool
	}{
		{func() error { return nil }, []bool{true}},
		{func() error { return r.Replace(plainly{}) }, []bool{true, true}},
		{func() error { return r.Remove("m") }, []bool{true, true, false}},
		{func() error { _ = r.Remove("m"); return nil }, []bool{true, true, false}}, // it is gone already
		{func() error { return r.Add(plainly{}) }, []bool{true, true, false, true}},
		{func() error { _ = r.Add(plainly{}); return nil }, []bool{true, true, false, true}}, // refused
		{func() error { stop(); return r.Remove("m") }, []bool{true, true, false, true}},
	} {
		if err := step.do(); err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(told, step.want) {
			t.Errorf("step %d: told %v, want %v", what, told, step.want)
		}
	}
}

func panics(t *testing.T, what string, f func()) {
	t.Helper()
	defer func() {
		if recover() == nil {
			t.Errorf("%s does not panic", what)
		}
	}()
	f()
}

// ill is a model that is closed, and whose health its own closing tells.
type ill struct {
	plainly
	told func(error)
}

func (m *ill) WatchHealth(told func(error)) (stop func()) {
	m.told = told
	told(nil)
	return func() { m.told = nil }
}

func (m *ill) Gauges() []engine.Gauge { return []engine.Gauge{{Name: "things", Value: 3}} }

func (m *ill) Close() error { m.told(engine.ErrClosed); return nil }

func TestWhatAModelOffersIsFoundUnderItsNames(t *testing.T) {
	m := &ill{}
	named := enginetest.Named("a", enginetest.Named("b", m))
	r := engine.NewRegistry()
	if err := r.Add(named); err != nil {
		t.Fatal(err)
	}
	found, release, err := r.Lookup("a")
	if err != nil {
		t.Fatal(err)
	}
	w, watched := engine.As[engine.HealthWatcher](found)
	g, gauged := engine.As[engine.Gauger](found)
	if !watched || !gauged || g.Gauges()[0].Value != 3 {
		t.Fatalf("found %v, %v", watched, gauged)
	}
	var health []error
	stop := w.WatchHealth(func(err error) { health = append(health, err) })
	defer stop()
	release()
	r.Close()
	if want := []error{nil, engine.ErrClosed}; !slices.Equal(health, want) {
		t.Errorf("told %v, want %v", health, want)
	}
	if _, ok := engine.As[engine.Gauger](enginetest.Named("c", plainly{})); ok {
		t.Error("found what the model has not")
	}
}
