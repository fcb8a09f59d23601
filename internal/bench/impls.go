package bench

import "fmt"

// Ways to use pindown's cache.
const (
	implPindown = "pindown"
	implLane    = "lane"
)

var cacheImpls = []string{implPindown}

func (s *cacheSubject) Worker(impl string) (Worker, error) {
	if impl == implPindown {
		return cacheWorker{s.cache}, nil
	}
	return nil, fmt.Errorf("%s: %w", impl, ErrUnfit)
}
