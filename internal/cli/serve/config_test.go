package serve

import (
	"bytes"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"

	"github.com/tensorferry/tensorferry/internal/cli/fail"
	"github.com/tensorferry/tensorferry/internal/cli/settings"
	"github.com/tensorferry/tensorferry/terms"
)

// configured is what serve makes of arguments, an environment and a file.
func configured(t *testing.T, args, environ []string, file string) (Config, string, error) {
	t.Helper()
	var c Config
	flags := pflag.NewFlagSet("serve", pflag.ContinueOnError)
	c.Flags(flags)
	flags.String("config", "", "")
	flags.Bool("print-config", false, "")
	if file != "" {
		path := filepath.Join(t.TempDir(), "ferry.yaml")
		require.NoError(t, os.WriteFile(path, []byte(file), 0o600))
		args = append(args, "--config", path)
	}
	require.NoError(t, flags.Parse(args))
	from, services, err := settings.Configure(flags, environ)
	c.Services, c.Former = services, settings.Former(flags, from)
	if err != nil {
		return c, "", err
	}
	var printed bytes.Buffer
	require.NoError(t, settings.Print(&printed, flags, from))
	return c, printed.String(), nil
}

func TestAFlagGoesBeforeTheEnvironmentAndThatBeforeTheFile(t *testing.T) {
	c, printed, err := configured(t,
		[]string{"--max-calls", "1", "--model", "a"},
		[]string{"TENSORFERRY_MAX_CALLS=2", "TENSORFERRY_MAX_SESSIONS=2", "TENSORFERRY_MODEL=b,c", "HOME=/", "TENSORFERRY_INSECURE=true"},
		"max-calls: 3\nmax-sessions: 3\nmax-streams: 3\nmodel: [d]\ndrain: 1m\nmax-tensor: 2GB\nstore: memory:1GiB\nlog-format: json\n")
	require.NoError(t, err)
	require.Equal(t, 1, c.server.QueuedCalls)
	require.Equal(t, 2, c.server.Sessions)
	require.Equal(t, 3, c.server.StreamsPerConnection)
	require.Equal(t, []string{"a"}, c.Engines.models)
	require.Equal(t, time.Minute, c.drain)
	require.EqualValues(t, 2e9, c.server.Session.TensorBytes)
	require.Equal(t, storeFlag{text: "memory:1GiB", bytes: 1 << 30}, c.store)
	require.Equal(t, "json", c.logFormat)
	require.True(t, c.insecure)
	require.Equal(t, DefaultListen, c.listen)
	for _, line := range []string{
		"max-calls: 1 # flag\n", "max-sessions: 2 # environment\n", "max-streams: 3 # file ", "model: # flag\n    - a\n",
		"insecure: true # environment\n", "listen: 127.0.0.1:50051 # default\n", "max-tensor: 2GB # file ",
	} {
		require.Contains(t, printed, line)
	}
}

func TestThePrintedConfigReadsBackAsTheSame(t *testing.T) {
	want, printed, err := configured(t, []string{
		"--model", "a=b c", "--model", "no: map", "--memory", "1GiB", "--verbose", "--session-idle", "1h", "--log-level", "warn", "--store", "some folder",
		"--listen", "[::1]:1", "--reflection=false",
	}, nil, "")
	require.NoError(t, err)
	got, again, err := configured(t, nil, nil, printed)
	require.NoError(t, err)
	require.Equal(t, want, got)
	require.Equal(t, strings.Count(printed, "\n"), strings.Count(again, "\n"))
	require.NotContains(t, again, "# default")

	plain, printed, err := configured(t, nil, nil, "")
	require.NoError(t, err)
	got, _, err = configured(t, nil, nil, printed)
	require.NoError(t, err)
	got.Engines.models = plain.Engines.models // none, or an empty list of them
	require.Equal(t, plain, got)
}

func TestAMistakeInTheConfigNamesItsKey(t *testing.T) {
	for name, tc := range map[string]struct {
		environ []string
		file    string
		want    string
	}{
		"an unknown key":               {file: "max-cals: 3", want: `max-cals in .*ferry.yaml is not a setting; did you mean max-calls in`},
		"an unknown variable":          {environ: []string{"TENSORFERRY_MAX_TENSR=3"}, want: "TENSORFERRY_MAX_TENSR is not a setting; did you mean TENSORFERRY_MAX_TENSOR\\?$"},
		"a key of the command line":    {file: "print-config: true", want: "print-config in .* is not a setting"},
		"a group of keys":              {file: "listen:\n  address: x", want: `listen in .*: it takes a value, not a group of keys`},
		"a size":                       {file: "memory: 12 parsecs", want: `memory in .*: "12 parsecs": not a size; use`},
		"a size of the environment":    {environ: []string{"TENSORFERRY_MEMORY=lots"}, want: `TENSORFERRY_MEMORY: "lots": not a size`},
		"a size over its most":         {file: "max-chunk: 5MiB", want: "max-chunk in .*: use 1 to 4MiB"},
		"none at all":                  {file: "max-calls: 0", want: "max-calls in .*: use 1 to 2147483647"},
		"no number":                    {file: "max-calls: many", want: `max-calls in .*: "many": not a whole number`},
		"a number without a unit":      {file: "drain: 10", want: "drain in .*: not a duration; use 10s"},
		"a time in the past":           {file: "memory-wait: -1s", want: "memory-wait in .*: use 1ms to 8760h"},
		"no word":                      {file: "log-level: loud", want: "log-level in .*: use info, debug, warn or error"},
		"no boolean":                   {file: "insecure: perhaps", want: "insecure in .*perhaps"},
		"no value":                     {file: "listen:", want: "listen in .*: no value"},
		"nothing for the store":        {file: `store: ""`, want: "store in .*: use memory, memory:2GiB or a folder"},
		"a store of no size":           {file: `store: "memory:"`, want: "store in .*not a size"},
		"a store of nothing":           {file: "store: memory:0", want: "store in .*use at least 1MiB, or memory"},
		"a store for nothing":          {file: "store: memory:5", want: "store in .*use at least 1MiB, or memory"},
		"a list for one value":         {file: "listen: [a, b]", want: "listen in .*: it takes one value, not a list"},
		"a key twice":                  {file: "listen: a\nlisten: b", want: `already defined`},
		"no map":                       {file: "- listen", want: "config file .*ferry.yaml: "},
		"no YAML":                      {file: "listen: [", want: "config file .*ferry.yaml: "},
		"a file that is not there":     {environ: []string{"TENSORFERRY_CONFIG=/no/such.yaml"}, want: "config file /no/such.yaml: .*no such file"},
		"a mistake that is overridden": {environ: []string{"TENSORFERRY_MAX_CALLS=2"}, file: "max-calls: many", want: "max-calls in .*not a whole number"},
	} {
		t.Run(name, func(t *testing.T) {
			_, _, err := configured(t, nil, tc.environ, tc.file)
			require.Error(t, err)
			require.Regexp(t, tc.want, err.Error())
			require.Equal(t, fail.ExitUsage, fail.ExitCode(t.Context(), err))
		})
	}
}

func TestAModelOfAFileMayHaveCommas(t *testing.T) {
	c, _, err := configured(t, nil, nil, "python: trunk=models:make,train,lease=1m\nmodel: a,b\n")
	require.NoError(t, err)
	require.Equal(t, []string{"trunk=models:make,train,lease=1m"}, c.Engines.python)
	require.Equal(t, []string{"a", "b"}, c.Engines.models)
}

func TestASettingThatWentAppliesWhereverItIsSetAndIsListedOnlyThen(t *testing.T) {
	c, printed, err := configured(t, []string{"--train", "a"}, []string{"TENSORFERRY_KPU_MODEL=b", "TENSORFERRY_MAX_SESSIONS=3"}, "max-streams: 4\nmax-calls: 5\n")
	require.NoError(t, err)
	require.Equal(t, []string{"a"}, c.Engines.train)
	require.Equal(t, "b", c.kpuConfig.Model)
	require.Equal(t, 4, c.server.StreamsPerConnection)
	former := map[string]string{}
	for _, f := range c.Former {
		former[f.Name] = f.Usage
	}
	require.Equal(t, map[string]string{"train": "--python NAME=module:function,train", "kpu-model": "--kpu ADDRESS,model=NAME", "max-streams": goOnly}, former)
	require.Contains(t, printed, "kpu-model: b # environment\n")
	require.NotContains(t, printed, "kpu-source")
}

func TestTheFileOfTheCommandLineGoesBeforeThatOfTheEnvironment(t *testing.T) {
	c, _, err := configured(t, nil, []string{"TENSORFERRY_CONFIG=/no/such.yaml"}, "max-calls: 3")
	require.NoError(t, err)
	require.Equal(t, 3, c.server.QueuedCalls)
}

func TestAnEmptyFileChangesNothing(t *testing.T) {
	want, _, err := configured(t, nil, nil, "")
	require.NoError(t, err)
	got, _, err := configured(t, nil, nil, "# nothing\n")
	require.NoError(t, err)
	require.Equal(t, want, got)
}

func TestTheFileInThePageWorks(t *testing.T) {
	page, err := os.ReadFile("../../../docs/operating.md")
	require.NoError(t, err)
	block := regexp.MustCompile("(?s)```yaml\n(.*?)```").FindSubmatch(page)
	require.NotNil(t, block)
	c, _, err := configured(t, nil, nil, string(block[1]))
	require.NoError(t, err)
	require.EqualValues(t, 8<<30, c.Engines.memory)
	require.Equal(t, []string{"models/trunk", "tail=models/other"}, c.Engines.models)
}

func TestEverySettingHasAHelpText(t *testing.T) {
	var c Config
	flags := pflag.NewFlagSet("serve", pflag.ContinueOnError)
	c.Flags(flags)
	for _, name := range settings.Names(flags) {
		require.NotEmpty(t, flags.Lookup(name).Usage, name)
	}
	require.Equal(t, terms.DefaultLimits(), c.server.Session, "what serve shows as default is the default")
}

// TestTheVariablesOfAKubernetesServiceAreIgnored has what Kubernetes makes for the Services
// tensorferry and tensorferry-gpu, with named ports of all protocols.
func TestTheVariablesOfAKubernetesServiceAreIgnored(t *testing.T) {
	made := []string{
		"TENSORFERRY_SERVICE_HOST=10.0.0.11", "TENSORFERRY_SERVICE_PORT=50051", "TENSORFERRY_SERVICE_PORT_GRPC=50051",
		"TENSORFERRY_PORT=tcp://10.0.0.11:50051", "TENSORFERRY_PORT_50051_TCP=tcp://10.0.0.11:50051",
		"TENSORFERRY_PORT_50051_TCP_PROTO=tcp", "TENSORFERRY_PORT_50051_TCP_PORT=50051", "TENSORFERRY_PORT_50051_TCP_ADDR=10.0.0.11",
		"TENSORFERRY_GPU_SERVICE_HOST=fd00::1", "TENSORFERRY_GPU_SERVICE_PORT_GRPC_WEB=80", "TENSORFERRY_GPU_PORT=udp://[fd00::1]:53",
		"TENSORFERRY_GPU_PORT_53_UDP=udp://[fd00::1]:53", "TENSORFERRY_GPU_PORT_9_SCTP_ADDR=fd00::1", "TENSORFERRY_2_PORT=sctp://10.0.0.1:9",
	}
	c, _, err := configured(t, nil, append([]string{"TENSORFERRY_MAX_CALLS=3"}, made...), "")
	require.NoError(t, err)
	require.Len(t, c.Services, len(made))
	require.EqualValues(t, 3, c.server.QueuedCalls)
	for _, ours := range []string{"TENSORFERRY_PORT=50051", "TENSORFERRY_SERVICE=x", "TENSORFERRY_PORT_50051=x", "TENSORFERRY_PORT_X_TCP=x", "TENSORFERRY_HOST=tcp://x"} {
		_, _, err := configured(t, nil, []string{ours}, "")
		require.ErrorContains(t, err, "is not a setting")
	}
}
