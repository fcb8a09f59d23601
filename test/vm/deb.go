package vm

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"sort"
	"strconv"
	"strings"
)

// cacheLayout is part of the cache's path, to be raised when what is unpacked changes.
const cacheLayout = "v1"

// kernelPackage matches the package of a plain 6.1 kernel, as against the cloud and real-time flavours, which lack rdma_rxe or differ in
// what tests look at.
var kernelPackage = regexp.MustCompile(`^linux-image-(6\.1\.[0-9.]+-[0-9]+-amd64)$`)

// rdmaPackages are unpacked for guests with [Options.RDMA]: the rdma command, libibverbs with its providers, and the verbs utilities.
var rdmaPackages = []string{
	"ibverbs-providers", "ibverbs-utils", "iproute2", "libbsd0", "libcap2", "libibverbs1", "libmd0", "libmnl0", "libnl-3-200",
	"libnl-route-3-200", "librdmacm1",
}

// kernel is an unpacked kernel package.
type kernel struct {
	release string // as uname -r prints it
	image   string // path of vmlinuz
	modules string // path of lib/modules/<release>
}

// cacheDir returns the directory that unpacked packages are kept in.
func cacheDir() (string, error) {
	dir := os.Getenv("PINDOWN_VM_CACHE")
	if dir == "" {
		base, err := os.UserCacheDir()
		if err != nil {
			return "", fmt.Errorf("find cache directory: %w", err)
		}
		dir = filepath.Join(base, "pindown-vm")
	}
	dir, err := filepath.Abs(filepath.Join(dir, cacheLayout))
	if err != nil {
		return "", fmt.Errorf("find cache directory: %w", err)
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", fmt.Errorf("create cache directory: %w", err)
	}
	return dir, nil
}

// fetchKernel returns the newest kernel in the cache, or fills the cache.
func fetchKernel() (kernel, error) {
	cache, err := cacheDir()
	if err != nil {
		return kernel{}, err
	}
	entries, err := os.ReadDir(cache)
	if err != nil {
		return kernel{}, fmt.Errorf("read cache directory: %w", err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	name, err := newestKernel(names)
	if err != nil {
		if name, err = resolveKernel(); err != nil {
			return kernel{}, err
		}
	}
	release := kernelPackage.FindStringSubmatch(name)[1]
	root, err := fetch(cache, name, []string{name}, keepOfKernel, func(root string) error {
		return checkKernel(kernelAt(root, release))
	})
	if err != nil {
		return kernel{}, err
	}
	return kernelAt(root, release), nil
}

func kernelAt(root, release string) kernel {
	k := kernel{release: release, image: filepath.Join(root, "boot", "vmlinuz-"+release)}
	k.modules = filepath.Join(root, "lib", "modules", release)
	if _, err := os.Stat(k.modules); err != nil { // merged /usr
		k.modules = filepath.Join(root, "usr", "lib", "modules", release)
	}
	return k
}

// checkKernel verifies that an unpacked kernel is whole, as far as this harness uses it.
func checkKernel(k kernel) error {
	f, err := os.Open(k.image)
	if err != nil {
		return err
	}
	defer f.Close()
	// See the kernel's Documentation/arch/x86/boot.rst.
	var magic [4]byte
	if _, err := f.ReadAt(magic[:], 0x202); err != nil {
		return fmt.Errorf("read %s: %w", k.image, err)
	}
	if string(magic[:]) != "HdrS" {
		return fmt.Errorf("check %s: not a bzImage", k.image)
	}
	set, err := openModules(k.modules)
	if err != nil {
		return err
	}
	_, err = set.resolve(append(baseModules, rdmaModules...)...)
	return err
}

// resolveKernel asks apt for the newest 6.1 kernel.
func resolveKernel() (string, error) {
	out, err := output(tool("apt-cache", "depends", "linux-image-amd64"))
	if err == nil {
		if name, err := newestKernel(strings.Fields(string(out))); err == nil {
			return name, nil
		}
	}
	// This is another release of Debian, or the metapackage is not in its list. A 6.1 kernel can still be.
	out, err = output(tool("apt-cache", "pkgnames", "linux-image-6.1."))
	if err != nil {
		return "", err
	}
	name, err := newestKernel(strings.Fields(string(out)))
	if err != nil {
		return "", fmt.Errorf("find kernel package: %w: run apt-get update; it is in Debian 12 (main and security)", err)
	}
	return name, nil
}

var errNoKernel = errors.New("no package linux-image-6.1.*-amd64")

// newestKernel returns the kernel package with the highest version.
func newestKernel(names []string) (string, error) {
	var found []string
	for _, n := range names {
		if kernelPackage.MatchString(n) {
			found = append(found, n)
		}
	}
	if len(found) == 0 {
		return "", errNoKernel
	}
	sort.Slice(found, func(i, j int) bool { return lessVersion(found[i], found[j]) })
	return found[len(found)-1], nil
}

var digits = regexp.MustCompile(`[0-9]+`)

// lessVersion compares names by the numbers in them.
func lessVersion(a, b string) bool {
	x, y := digits.FindAllString(a, -1), digits.FindAllString(b, -1)
	for i := range min(len(x), len(y)) {
		m, _ := strconv.ParseUint(x[i], 10, 64)
		n, _ := strconv.ParseUint(y[i], 10, 64)
		if m != n {
			return m < n
		}
	}
	return len(x) < len(y)
}

// fetchRDMA returns the root of the unpacked RDMA user space.
func fetchRDMA() (string, error) {
	cache, err := cacheDir()
	if err != nil {
		return "", err
	}
	return fetch(cache, "rdma", rdmaPackages, func(string) bool { return true }, func(root string) error {
		_, err := findIn([]string{root}, programDirs, "rdma")
		return err
	})
}

// fetch returns the directory cache/name, after it has downloaded and unpacked packages into it if it isn't there.
//
// apt verifies what it downloads by the signed index. The directory appears whole or not at all: it is made under another name and renamed. Where two
// processes fetch at once, one of them wins and both use its result.
func fetch(cache, name string, pkgs []string, keep func(string) bool, check func(root string) error) (string, error) {
	dst := filepath.Join(cache, name)
	if _, err := os.Stat(dst); err == nil {
		return dst, nil
	}
	tmp, err := os.MkdirTemp(cache, "tmp-*")
	if err != nil {
		return "", fmt.Errorf("fetch %s: %w", name, err)
	}
	defer os.RemoveAll(tmp)
	debs, root := filepath.Join(tmp, "debs"), filepath.Join(tmp, "root")
	for _, dir := range []string{debs, root} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			return "", fmt.Errorf("fetch %s: %w", name, err)
		}
	}
	args := []string{"-q", "download"}
	if os.Getuid() == 0 {
		args = append([]string{"-o", "APT::Sandbox::User=root"}, args...) // Its own user could not write here, and it would complain.
	}
	cmd := tool("apt-get", append(args, pkgs...)...)
	cmd.Dir = debs
	if _, err := output(cmd); err != nil {
		return "", fmt.Errorf("fetch %s: %w", name, err)
	}
	files, err := filepath.Glob(filepath.Join(debs, "*.deb"))
	if err != nil || len(files) != len(pkgs) {
		return "", fmt.Errorf("fetch %s: %d files for %d packages: %w", name, len(files), len(pkgs), err)
	}
	for _, deb := range files {
		if err := unpack(deb, root, keep); err != nil {
			return "", fmt.Errorf("fetch %s: %w", name, err)
		}
	}
	if err := check(root); err != nil {
		return "", fmt.Errorf("fetch %s: check: %w", name, err)
	}
	if err := os.Rename(root, dst); err != nil && !errors.Is(err, os.ErrExist) {
		return "", fmt.Errorf("fetch %s: %w", name, err)
	}
	return dst, nil
}

// unpack writes those files of a package that keep wants below dir.
func unpack(deb, dir string, keep func(name string) bool) error {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return fmt.Errorf("unpack %s: %w", filepath.Base(deb), err)
	}
	defer root.Close()
	cmd := tool("dpkg-deb", "--fsys-tarfile", deb)
	var stderr strings.Builder
	cmd.Stderr = &stderr
	pipe, err := cmd.StdoutPipe()
	if err != nil {
		return fmt.Errorf("unpack %s: %w", filepath.Base(deb), err)
	}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("unpack %s: %w", filepath.Base(deb), err)
	}
	err = untar(tar.NewReader(pipe), root, keep)
	if err == nil {
		_, err = io.Copy(io.Discard, pipe) // padding after the last entry
	} else {
		_ = cmd.Process.Kill()
	}
	if werr := cmd.Wait(); err == nil && werr != nil {
		err = fmt.Errorf("run dpkg-deb: %w: %s", werr, stderr.String())
	}
	if err != nil {
		return fmt.Errorf("unpack %s: %w", filepath.Base(deb), err)
	}
	return nil
}

// untar writes what keep wants below root, which no entry can escape.
func untar(r *tar.Reader, root *os.Root, keep func(name string) bool) error {
	for {
		h, err := r.Next()
		if err == io.EOF { //nolint:errorlint // documented as the bare value
			return nil
		}
		if err != nil {
			return fmt.Errorf("read tar: %w", err)
		}
		name := strings.TrimPrefix(path.Clean(h.Name), "/")
		if !keep(name) || h.Typeflag == tar.TypeDir {
			continue
		}
		if err := root.MkdirAll(path.Dir(name), 0o755); err != nil {
			return fmt.Errorf("write %s: %w", name, err)
		}
		switch h.Typeflag {
		case tar.TypeReg:
			err = writeFrom(root, name, h.FileInfo().Mode().Perm(), r)
		case tar.TypeSymlink:
			err = root.Symlink(h.Linkname, name)
		case tar.TypeLink:
			err = root.Link(path.Clean(h.Linkname), name)
		}
		if err != nil {
			return fmt.Errorf("write %s: %w", name, err)
		}
	}
}

func writeFrom(root *os.Root, name string, perm os.FileMode, r io.Reader) error {
	f, err := root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, perm)
	if err != nil {
		return err
	}
	_, err = io.Copy(f, r)
	return errors.Join(err, f.Close())
}

// keepOfKernel leaves out documentation and three quarters of the modules: drivers of hardware that the guest can't have.
func keepOfKernel(name string) bool {
	if strings.HasPrefix(name, "usr/share/") {
		return false
	}
	_, module, ok := strings.Cut(name, "/kernel/")
	if !ok {
		return true
	}
	for _, dir := range []string{
		"drivers/gpu/", "drivers/hwmon/", "drivers/iio/", "drivers/input/", "drivers/isdn/", "drivers/media/", "drivers/mfd/",
		"drivers/net/ethernet/", "drivers/net/wireless/", "drivers/scsi/", "drivers/staging/", "drivers/usb/", "sound/",
	} {
		if strings.HasPrefix(module, dir) {
			return false
		}
	}
	return true
}
