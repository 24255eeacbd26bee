package reason

import (
	"strings"
	"testing"
)

func TestEachReasonIsOnceInTheTable(t *testing.T) {
	seen := map[Reason]bool{}
	for _, r := range Table {
		switch code := Find(r.Code, ""); {
		case seen[r.Reason]:
			t.Errorf("%s is there twice", r.Reason)
		case Parse(string(r.Reason)) != r.Reason:
			t.Errorf("%q is not a reason", r.Reason)
		case code.Reason != r.Code || code.Code != r.Code:
			t.Errorf("%s: %s is not a code", r.Reason, r.Code)
		case r.Title == "" || r.Exit == 0 || r.Side == "":
			t.Errorf("%s lacks something", r.Reason)
		}
		seen[r.Reason] = true
		if rest := strings.NewReplacer(Asked, "", Flag, "").Replace(r.Do); strings.ContainsAny(rest, "{}") {
			t.Errorf("%s: %q has an unknown place for a flag", r.Reason, r.Do)
		}
	}
}

func TestAnOlderOrNewerPeersFailureHasTheRowOfItsCode(t *testing.T) {
	for _, tc := range []struct {
		r    Reason
		code string
		want Reason
	}{
		{StoreFull, "RESOURCE_EXHAUSTED", StoreFull},
		{StoreFull, "", StoreFull},
		{"", "RESOURCE_EXHAUSTED", "RESOURCE_EXHAUSTED"},
		{"OF_A_NEWER_PEER", "NOT_FOUND", "NOT_FOUND"},
		{"", "", "UNKNOWN"},
	} {
		if got := Find(tc.r, tc.code).Reason; got != tc.want {
			t.Errorf("%q with %q has the row of %s, not of %s", tc.r, tc.code, got, tc.want)
		}
	}
}
