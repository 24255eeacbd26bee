package reason_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"

	pb "github.com/tensorferry/tensorferry/api/tensorferry/v1"
	"github.com/tensorferry/tensorferry/client"
	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/engine/cpu"
	"github.com/tensorferry/tensorferry/frame"
	"github.com/tensorferry/tensorferry/identity"
	"github.com/tensorferry/tensorferry/internal/cli/fail"
	"github.com/tensorferry/tensorferry/internal/fault"
	"github.com/tensorferry/tensorferry/internal/testkit"
	"github.com/tensorferry/tensorferry/reason"
	"github.com/tensorferry/tensorferry/server"
	"github.com/tensorferry/tensorferry/slab"
	"github.com/tensorferry/tensorferry/store"
	"github.com/tensorferry/tensorferry/store/memory"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/terms"
)

// example provokes a failure, and returns the error that a client has.
type example func(t *testing.T) error

var examples = map[reason.Reason]example{
	reason.NoConnection: func(t *testing.T) error { return info(t, unused(t), client.Config{}) },
	reason.HostNotFound: func(t *testing.T) error { return info(t, "host.invalid:1", client.Config{}) },
	reason.NoAnswer: func(t *testing.T) error {
		l := listen(t) // nobody accepts
		return info(t, l.Addr().String(), client.Config{OpenTimeout: 50 * time.Millisecond})
	},
	reason.NotServer: func(t *testing.T) error { return info(t, stock(t, nil), client.Config{}) },
	reason.CircuitOpen: func(t *testing.T) error {
		c := dial(t, unused(t), client.Config{BreakAfter: 1})
		_, err := c.Info(t.Context())
		require.Error(t, err)
		_, err = c.Info(t.Context())
		return err
	},
	reason.Input: func(t *testing.T) error {
		return push(t, serve(t, nil), client.Input{Name: "x", Desc: bytesDesc(8), Reader: strings.NewReader("short")})
	},
	reason.InputIdle: func(t *testing.T) error {
		r, w := net.Pipe()
		t.Cleanup(func() { _ = r.Close(); _ = w.Close() })
		c := dial(t, serve(t, nil), client.Config{InputIdle: 50 * time.Millisecond, Idled: func(error) { _ = r.Close() }})
		return pushOn(t, c, client.Input{Name: "x", Desc: bytesDesc(8), Reader: r})
	},

	reason.ServerWithoutTLS:  func(t *testing.T) error { return secured(t, serve(t, nil), certificates(t).client()) },
	reason.ServerCertUnknown: func(t *testing.T) error { return secured(t, certificates(t).serve(t), certificates(t).client()) },
	reason.ServerCertHost: func(t *testing.T) error {
		c := certificates(t)
		f := c.client()
		f.ServerName = "other.example"
		return secured(t, c.serve(t), f)
	},
	reason.ServerCertNoHost: func(t *testing.T) error {
		return toServerWith(t, &x509.Certificate{NotAfter: time.Now().Add(time.Hour), ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}})
	},
	reason.ServerCertExpired: func(t *testing.T) error {
		return toServerWith(t, &x509.Certificate{DNSNames: []string{"localhost"}, NotAfter: time.Now().Add(-time.Hour), ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}})
	},
	reason.TLSRequired: func(t *testing.T) error { return info(t, certificates(t).serve(t), client.Config{}) },
	reason.CredentialsRequired: func(t *testing.T) error {
		c := certificates(t)
		return secured(t, c.serve(t), identity.ClientFiles{CA: c.at(identity.AuthorityFile)})
	},
	reason.CertRequired: func(t *testing.T) error {
		c := certificates(t)
		pair, err := tls.LoadX509KeyPair(c.at(identity.ServerFile), c.at(identity.ServerKeyFile))
		require.NoError(t, err)
		tlsOnly := credentials.NewTLS(&tls.Config{Certificates: []tls.Certificate{pair}, ClientAuth: tls.RequireAnyClientCert, MinVersion: tls.VersionTLS13})
		return secured(t, stock(t, nil, grpc.Creds(tlsOnly)), identity.ClientFiles{CA: c.at(identity.AuthorityFile)})
	},
	reason.TokenRequired: func(t *testing.T) error {
		c := certificates(t)
		files := c.server()
		files.ClientCA = ""
		return secured(t, c.serveFiles(t, files), identity.ClientFiles{CA: c.at(identity.AuthorityFile)})
	},
	reason.TokenUnknown: func(t *testing.T) error {
		c := certificates(t)
		require.NoError(t, os.WriteFile(c.at("wrong"), []byte(strings.Repeat("w", 32)), 0o600))
		return secured(t, c.serve(t), identity.ClientFiles{CA: c.at(identity.AuthorityFile), Token: c.at("wrong")})
	},
	reason.CertUnknown: func(t *testing.T) error {
		c, other := certificates(t), certificates(t)
		f := other.client()
		f.CA = c.at(identity.AuthorityFile)
		return secured(t, c.serve(t), f)
	},
	reason.CertUse: func(t *testing.T) error {
		c := certificates(t)
		f := c.client()
		f.Cert, f.Key = c.at(identity.ServerFile), c.at(identity.ServerKeyFile)
		return secured(t, c.serve(t), f)
	},

	reason.Draining: func(t *testing.T) error {
		s, address := serveWith(t, nil)
		c := dial(t, address, client.Config{})
		_, err := c.Call(t.Context(), client.Request{Model: "waits", Inputs: []client.Input{{Desc: one.Desc, Data: one.Data}}})
		require.NoError(t, err)
		ctx, cancel := context.WithCancel(t.Context())
		down := make(chan struct{})
		go func() { _ = s.Shutdown(ctx); close(down) }()
		t.Cleanup(func() { cancel(); <-down })
		testkit.Eventually(t, func() bool {
			_, err = c.Session(t.Context())
			return err != nil
		}, "the server drains")
		return err
	},
	reason.Connections: func(t *testing.T) error {
		address := serve(t, func(c *server.Config) { c.Connections = 4 })
		for range 4 {
			require.NoError(t, info(t, address, client.Config{}))
		}
		return info(t, address, client.Config{})
	},
	reason.Open: func(t *testing.T) error {
		address := serve(t, func(c *server.Config) { c.Session.OpenCalls = 1 })
		session, err := dial(t, address, client.Config{}).Session(t.Context())
		require.NoError(t, err)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		_, err = session.Call(ctx, client.Request{Model: "waits", Inputs: []client.Input{{Desc: one.Desc, Data: one.Data}}})
		require.NoError(t, err)
		_, err = session.Compute(t.Context(), "echo", one)
		return err
	},
	reason.Memory: model(slab.ErrMemory),
	reason.Budget: stored(slab.ErrBudget),
	reason.TooLarge: func(t *testing.T) error {
		return push(t, serve(t, func(c *server.Config) { c.StoredBytes = 4 }), client.Input{Name: "x", Desc: bytesDesc(8), Data: make([]byte, 8)})
	},
	reason.RoleCalls: refusing(&terms.RefusedError{Code: frame.ResourceExhausted, Reason: reason.RoleCalls, Text: "calls", RetryMillis: 1}),
	reason.RoleBytes: refusing(&terms.RefusedError{Code: frame.ResourceExhausted, Reason: reason.RoleBytes, Text: "bytes"}),

	reason.ModelNotFound:    compute("none", client.Request{}),
	reason.ModelInput:       model(engine.ErrInput),
	reason.ModelParam:       compute("echo", client.Request{Params: map[string]string{"none": "1"}}),
	reason.ModelPorts:       compute("echo", client.Request{Inputs: []client.Input{{Port: "none", Desc: one.Desc, Data: one.Data}}}),
	reason.ModelState:       model(engine.ErrPrecondition),
	reason.StateLost:        model(engine.ErrStateLost),
	reason.ModelFailed:      model(errors.New("a defect")),
	reason.ModelUnavailable: model(engine.ErrUnavailable),
	reason.CallTimeout:      compute("waits", client.Request{Timeout: 50 * time.Millisecond}),

	reason.NoStore:   func(t *testing.T) error { return push(t, serve(t, func(c *server.Config) { c.Store = nil }), tiny) },
	reason.StoreFull: stored(store.ErrFull),
	reason.StoreSlow: stored(context.DeadlineExceeded),
	reason.StoreTooSmall: func(t *testing.T) error {
		return push(t, serve(t, nil), client.Input{Name: "x", Desc: bytesDesc(2 << 20), Data: make([]byte, 2<<20)})
	},
	reason.DiskFull:         stored(fmt.Errorf("%w: %w", store.ErrFull, store.ErrDiskFull)),
	reason.StoreReadOnly:    stored(store.ErrReadOnly),
	reason.StoreUnwritable:  stored(store.ErrUnwritable),
	reason.StoreUnavailable: stored(store.ErrUnavailable),
	reason.ShuttingDown:     stored(store.ErrClosed),
	reason.Files:            stored(syscall.EMFILE),
	reason.TensorExists:     stored(store.ErrExists),
	reason.TensorInFile:     stored(store.ErrPart),
	reason.TensorVanished:   stored(fault.ErrVanished),
	reason.TensorReplaced:   stored(frame.Because(reason.TensorReplaced, "replaced")),
	reason.BadSource:        stored(store.ErrParams),
	reason.BadName: func(t *testing.T) error {
		return push(t, serve(t, nil), client.Input{Name: "x/", Desc: bytesDesc(1), Data: make([]byte, 1)})
	},
	reason.TensorNotFound: func(t *testing.T) error {
		_, err := dial(t, serve(t, nil), client.Config{}).Pull(t.Context(), client.PullRequest{Select: []client.Selection{{Name: "none"}}})
		return err
	},
	reason.CertExpired: func(t *testing.T) error {
		c := certificates(t)
		f := c.client()
		f.Cert, f.Key = c.signed(t, &x509.Certificate{NotAfter: time.Now().Add(-time.Hour), ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}})
		return secured(t, c.serve(t), f)
	},
}

// TestEachRowHasAnExampleThatGivesIt provokes each failure. Those that are only codes come from a
// server that gives no reasons, as older ones do.
func TestEachRowHasAnExampleThatGivesIt(t *testing.T) {
	for _, row := range reason.Table {
		t.Run(string(row.Reason), func(t *testing.T) {
			testkit.Start(t)
			provoke := examples[row.Reason]
			if row.Reason == row.Code {
				provoke = func(t *testing.T) error {
					return info(t, stock(t, status.Error(codes.Code(frame.CodeOf(row.Reason)), "unknown method /x")), client.Config{})
				}
			}
			require.NotNil(t, provoke, "there is no example")
			err := provoke(t)
			require.Error(t, err)
			got, ok := fail.Row(err)
			require.True(t, ok, err)
			require.Equal(t, row, got, err)
			if own, ok := errors.AsType[*client.Error](err); ok {
				require.Equal(t, string(row.Code), frame.Code(own.Code).String(), err)
			}
		})
	}
}

var (
	one  = tensor.Tensor{Desc: bytesDesc(1), Data: []byte{1}}
	tiny = client.Input{Name: "x", Desc: bytesDesc(1), Data: []byte{1}}
)

func bytesDesc(n int) tensor.Desc {
	return tensor.Desc{DType: tensor.Uint8, Shape: tensor.Shape{int64(n)}}
}

func listen(t *testing.T) net.Listener {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { _ = l.Close() })
	return l
}

func unused(t *testing.T) string {
	l := listen(t)
	require.NoError(t, l.Close())
	return l.Addr().String()
}

func dial(t *testing.T, address string, cfg client.Config) *client.Client {
	c, err := client.Dial(address, cfg)
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func info(t *testing.T, address string, cfg client.Config) error {
	_, err := dial(t, address, cfg).Info(t.Context())
	return err
}

func pushOn(t *testing.T, c *client.Client, in client.Input) error {
	_, err := c.Push(t.Context(), client.PushRequest{Tensors: []client.Input{in}})
	return err
}

func push(t *testing.T, address string, in client.Input) error {
	return pushOn(t, dial(t, address, client.Config{}), in)
}

// older is a server that gives no reasons.
type older struct {
	pb.UnimplementedTensorServiceServer
	err error
}

func (o older) GetServiceInfo(context.Context, *pb.GetServiceInfoRequest) (*pb.GetServiceInfoResponse, error) {
	return nil, o.err
}

// stock starts a server of grpc-go with a TensorService that fails with err, or with none.
func stock(t *testing.T, err error, options ...grpc.ServerOption) string {
	s := grpc.NewServer(options...)
	if err != nil {
		pb.RegisterTensorServiceServer(s, older{err: err})
	}
	l := listen(t)
	go func() { _ = s.Serve(l) }() // ends with Stop
	t.Cleanup(s.Stop)
	return l.Addr().String()
}

func serve(t *testing.T, change func(*server.Config)) string {
	_, address := serveWith(t, change)
	return address
}

// serveWith starts a server with the built-in models, one that waits for the end of its call, and
// a store of 1 MiB.
func serveWith(t *testing.T, change func(*server.Config)) (*server.Server, string) {
	host := cpu.NewHost(cpu.HostConfig{MemoryBytes: 64 << 20, Workers: 1})
	models := engine.NewRegistry()
	for _, m := range append(cpu.Builtins(host), funcModel(t, host, "waits", func(ctx context.Context) error { <-ctx.Done(); return context.Cause(ctx) })) {
		require.NoError(t, models.Add(m))
	}
	cfg := server.Config{Models: models, Pool: host.Pool(), Budget: host.Budget(), Store: memory.New(host.Pool(), 1<<20)}
	if change != nil {
		change(&cfg)
	}
	s, err := server.New(cfg)
	require.NoError(t, err)
	l := listen(t)
	served := make(chan error, 1)
	go func() { served <- s.Serve(l) }() // ends with Close
	t.Cleanup(func() {
		s.Close()
		require.NoError(t, <-served)
		host.Close()
	})
	return s, l.Addr().String()
}

func funcModel(t *testing.T, host *cpu.Host, name string, f func(context.Context) error) engine.Model {
	ports := []engine.Port{{Name: "x", Shape: tensor.Shape{-1}}}
	m, err := cpu.Func{Info: engine.Info{Name: name, Inputs: ports, Outputs: []engine.Port{{Name: "y", Shape: tensor.Shape{-1}}}}, Call: func(ctx context.Context, in []tensor.Tensor, _ map[string]string) ([]tensor.Tensor, error) {
		return in, f(ctx)
	}}.Model(host)
	require.NoError(t, err)
	return m
}

// model runs one that fails.
func model(why error) example {
	return func(t *testing.T) error {
		address := serve(t, func(c *server.Config) {
			host := cpu.NewHost(cpu.HostConfig{MemoryBytes: 1 << 20, Workers: 1})
			t.Cleanup(host.Close)
			require.NoError(t, c.Models.Add(funcModel(t, host, "fails", func(context.Context) error { return why })))
		})
		_, err := dial(t, address, client.Config{}).Compute(t.Context(), "fails", one)
		return err
	}
}

// compute runs a call.
func compute(name string, r client.Request) example {
	return func(t *testing.T) error {
		if r.Model = name; r.Inputs == nil {
			r.Inputs = []client.Input{{Desc: one.Desc, Data: one.Data}}
		}
		session, err := dial(t, serve(t, nil), client.Config{}).Session(t.Context())
		require.NoError(t, err)
		call, err := session.Call(t.Context(), r)
		if err == nil {
			_, err = call.Wait()
		}
		return err
	}
}

// failing is a store that takes nothing.
type failing struct {
	store.Store
	why error
}

func (f failing) Create(context.Context, string, tensor.Desc, map[string]string) (store.Writer, error) {
	return nil, f.why
}

// stored pushes to a store that fails.
func stored(why error) example {
	return func(t *testing.T) error {
		return push(t, serve(t, func(c *server.Config) { c.Store = failing{c.Store, why} }), tiny)
	}
}

// refusing asks a server whose roles do not allow it.
func refusing(why error) example {
	return func(t *testing.T) error {
		return push(t, serve(t, func(c *server.Config) { c.Authorize = func(context.Context, server.Action) error { return why } }), tiny)
	}
}

// folder has certificates.
type folder string

func certificates(t *testing.T) folder {
	dir := folder(t.TempDir())
	_, err := identity.WriteCertificates(string(dir), nil, "alice")
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(dir.at("tokens"), []byte(strings.Repeat("t", 32)), 0o600))
	return dir
}

func (f folder) at(name string) string { return filepath.Join(string(f), name) }

func (f folder) client() identity.ClientFiles {
	return identity.ClientFiles{CA: f.at(identity.AuthorityFile), Cert: f.at("alice.pem"), Key: f.at("alice-key.pem")}
}

func (f folder) server() identity.ServerFiles {
	return identity.ServerFiles{Cert: f.at(identity.ServerFile), Key: f.at(identity.ServerKeyFile), ClientCA: f.at(identity.AuthorityFile), Tokens: f.at("tokens")}
}

func (f folder) serve(t *testing.T) string { return f.serveFiles(t, f.server()) }

func (f folder) serveFiles(t *testing.T, files identity.ServerFiles) string {
	id, err := identity.NewServer(files, slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	return serve(t, func(c *server.Config) { c.Credentials, c.Identify = id.Credentials(), id.Principal })
}

// secured asks a server over TLS.
func secured(t *testing.T, address string, files identity.ClientFiles) error {
	creds, perRPC, err := files.Credentials()
	require.NoError(t, err)
	return info(t, address, client.Config{Credentials: creds, PerRPC: perRPC})
}

// signed writes a certificate that the folder's authority has signed, and its key.
func (f folder) signed(t *testing.T, c *x509.Certificate) (cert, key string) {
	authority, err := tls.LoadX509KeyPair(f.at(identity.AuthorityFile), f.at(identity.AuthorityKeyFile))
	require.NoError(t, err)
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	c.NotBefore = c.NotAfter.Add(-2 * time.Hour)
	c.Subject.CommonName = "x"
	der, err := x509.CreateCertificate(rand.Reader, c, authority.Leaf, private.Public(), authority.PrivateKey)
	require.NoError(t, err)
	encoded, err := x509.MarshalPKCS8PrivateKey(private)
	require.NoError(t, err)
	cert, key = f.at("signed.pem"), f.at("signed-key.pem")
	require.NoError(t, os.WriteFile(cert, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600))
	require.NoError(t, os.WriteFile(key, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: encoded}), 0o600))
	return cert, key
}

// toServerWith asks a server that has a certificate which package identity would not take.
func toServerWith(t *testing.T, c *x509.Certificate) error {
	dir := certificates(t)
	pair, err := tls.LoadX509KeyPair(dir.signed(t, c))
	require.NoError(t, err)
	creds := credentials.NewTLS(&tls.Config{Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS13})
	return secured(t, stock(t, nil, grpc.Creds(creds)), identity.ClientFiles{CA: dir.at(identity.AuthorityFile)})
}
