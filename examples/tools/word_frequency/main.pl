#!/usr/bin/perl
# A tool in Perl: core modules only (JSON::PP comes with Perl).
use strict;
use warnings;
use JSON::PP ();

# Descriptor 1 becomes the log, so that no print gets into the reply.
open(my $channel, '>&', \*STDOUT) or die "stdout: $!";
open(STDOUT, '>&', \*STDERR) or die "stderr: $!";

my $json = JSON::PP->new->utf8->canonical->allow_bignum;
my $request = $json->decode(do { local $/; <STDIN> });

sub answer {
    my ($ok, %body) = @_;
    my $reply = { protocol => 1, call_id => $request->{call_id}, ok => $ok ? $JSON::PP::true : $JSON::PP::false, %body };
    print {$channel} $json->encode($reply), "\n";
    close($channel) or exit 1;
    exit($ok ? 0 : 1);
}

sub fail {
    my ($code, $message) = @_;
    answer(0, error => { code => $code, message => $message });
}

sub call {
    my ($arguments) = @_;
    my $path = $arguments->{path};
    my $most = $arguments->{most} // 10;
    utf8::encode($path);    # file names are bytes
    -f $path or fail('NO_SUCH_FILE', 'there is no such file in the workspace');
    open(my $file, '<:raw', $path) or fail('NO_SUCH_FILE', "the file cannot be opened: $!");
    my %count;
    while (my $line = <$file>) {
        utf8::decode($line);
        $count{ lc $1 }++ while $line =~ /(\w+)/g;
    }
    my @words = sort { $count{$b} <=> $count{$a} || $a cmp $b } keys %count;
    my $distinct = @words;
    splice(@words, $most) if @words > $most;
    answer(1, result => { distinct => $distinct, words => [ map { { word => $_, count => $count{$_} } } @words ] });
}

my $operation = $request->{operation} // '';
if    ($operation eq 'call')     { call($request->{arguments}) }
elsif ($operation eq 'describe') { answer(1, result => { name => 'word_frequency', version => '1.0' }) }
elsif ($operation eq 'health')   { answer(1, result => { healthy => $JSON::PP::true }) }
else                             { fail('UNSUPPORTED', 'this tool knows call, describe and health') }
